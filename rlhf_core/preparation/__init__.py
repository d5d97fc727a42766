"""The preparation of data: formats, sources, filters, split and expectations."""
