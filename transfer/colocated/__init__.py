"""Bytes that ranks of one host read from each other's memory."""
