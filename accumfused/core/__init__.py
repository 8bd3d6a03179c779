"""What happens to gradients; knows neither torch.optim nor torch.distributed."""
