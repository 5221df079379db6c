"""Messages between ranks and gateway, as bytes."""
