"""What the multi-process tests stand on: worker pools, inputs that tell ranks apart, expectations."""
