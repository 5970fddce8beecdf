"""Opens the sources of samples and reads them as rows: JSON lines, tables, folders, hub ids, Python."""
