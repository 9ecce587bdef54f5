"""Training of draft heads for speculative decoding, on text that the target model writes itself."""
