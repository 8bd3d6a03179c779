"""What each storage format costs in accuracy: two studies, each a script. Nothing here is timed."""
