"""Who moves it when: the control plane."""
