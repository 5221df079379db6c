"""The cycle of a colocated run: when trainer and engine have the device's memory."""
