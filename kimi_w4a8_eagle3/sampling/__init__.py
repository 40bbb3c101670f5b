"""The token that a target model samples: a pure function of its probabilities, the request's seed and the position."""
