"""One file a language, named by its code: what `normalize` does beyond what all languages share."""
