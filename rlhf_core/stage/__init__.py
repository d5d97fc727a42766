"""What every stage does around its work: parameters, scratch folder, one run at a time, outputs that are whole or absent."""
