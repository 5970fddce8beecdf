"""Builds self-contained HTML pages: one file, no requests, light and dark, from a phone's width on."""
