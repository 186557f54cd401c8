"""What the multi-process numerics tests stand on: worker pools, inputs that tell ranks apart, expectations."""
