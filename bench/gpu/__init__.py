"""`make gpu`: what ten minutes with a GPU can tell. `run.sh` has the stages; docs/internals/gpu.md says more."""
