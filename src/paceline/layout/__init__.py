"""Where values are: keys, tensors, ranges, and which server owns which part."""
