"""The report: figures and one HTML page from run directories."""
