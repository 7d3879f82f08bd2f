"""What every wing stands on: errors, configs, trees of arrays, files, texts, and the parts of JAX that change."""
