"""The device functions of sampling in Triton, by what they compute; `..kernel` launches them."""
