"""The way from gradients to updated weights; it knows neither torch.optim nor torch.distributed."""
