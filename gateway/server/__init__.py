"""The HTTP server: routes, who may ask what, and how the process runs."""
