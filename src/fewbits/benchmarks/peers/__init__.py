"""Other libraries, called as their own users do: in comes a packed weight, out a contender whose products are checked and timed."""
