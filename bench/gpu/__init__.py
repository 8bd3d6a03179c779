"""`make gpu`: what ten minutes with a GPU can tell, in stages with a limit each. docs/internals/gpu.md says more."""
