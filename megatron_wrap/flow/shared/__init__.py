"""Bases and losses that several flows share: text, next-token prediction, pairs, preferences."""
