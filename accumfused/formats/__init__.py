"""How parameters and states are kept: as numbers of which kind, converted how, and as parts on which process."""
