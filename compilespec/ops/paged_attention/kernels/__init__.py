"""The device functions of paged attention in Triton; `..kernel` launches them."""
