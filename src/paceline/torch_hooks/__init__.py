"""What paceline relies on in PyTorch beyond its documented names."""
