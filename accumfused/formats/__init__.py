"""How memory holds parameters and states: number formats, conversions between them, and shards on processes."""
