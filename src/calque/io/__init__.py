"""Files and records: reading and writing every format that Calque supports."""
