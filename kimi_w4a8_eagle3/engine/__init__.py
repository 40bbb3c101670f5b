"""One engine process, seen from outside: started, asked, measured, watched, ended with everything it left behind."""
