"""What the scripts that train on images share: their flags, their data, and the loop."""
