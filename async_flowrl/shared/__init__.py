"""Processes of `placement=shared`: each samples and trains with a single copy of the base weights."""
