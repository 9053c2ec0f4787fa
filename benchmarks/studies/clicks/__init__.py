"""What the study of clicks is made of: its tables, its methods, its metrics, the step that is timed, and its page."""
