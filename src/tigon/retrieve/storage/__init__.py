"""Files that survive a kill or a full disk: durable writes, a folder lock, and a record journal."""
