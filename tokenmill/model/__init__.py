"""What is computed: architectures as data, and the one decoder that runs them."""
