"""Reports: tables and one HTML page from run directories."""
