"""Messages of an exchange, and the schedule of rounds that sends them."""
