"""What each storage format costs in accuracy: three studies, each a script. Nothing here is timed."""
