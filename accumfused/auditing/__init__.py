"""Says whether an accumulated update is that of the large batch, and why not; for any loop and any optimizer."""
