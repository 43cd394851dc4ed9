"""PyTorch's own tests of torch.distributed, which come in its wheel, run against labkit's back end."""
