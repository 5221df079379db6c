"""Loaders of engines, traced: what they write where, and what they compute beside."""
