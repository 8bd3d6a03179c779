"""Several processes: their groups, and the exchange of their windows."""
