"""Layouts of whole sides: merged from reports, inspected, and their digests compared."""
