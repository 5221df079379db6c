"""The control plane: gateway, pairs, instances, connects and updates."""
