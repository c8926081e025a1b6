"""One process that samples and trains, with one copy of the base (`placement=shared`)."""
