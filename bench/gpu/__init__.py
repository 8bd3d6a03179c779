"""`make gpu`: what a few minutes with a GPU can tell, in stages, each with a limit of its own. docs/gpu.md says more."""
