"""The basis of all other packages: errors, configs, trees of arrays, files, texts, and the parts of JAX that change."""
