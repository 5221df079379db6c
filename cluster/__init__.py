"""Trainer ranks, engines and the gateway as processes of a Ray cluster."""
