"""The sections of the configuration: dataclasses whose fields are the keys, with their texts and rules."""
