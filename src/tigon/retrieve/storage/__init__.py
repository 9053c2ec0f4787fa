"""Files that survive a kill or a full disk: durable writes, the lock of a folder, and a journal of records."""
