"""Opens what a source names, and reads it as rows: JSON lines, tables, folders, hub ids, Python."""
