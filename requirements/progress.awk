# Turns pip's log into visible progress.
/^Collecting|^Requirement already/ {
    n++
    if (tty) { printf "\r  %3d/%d %-50s", n, total, substr($2, 1, 50); fflush() }
    else if (n % 20 == 0 || n == total) { printf "  %d/%d\n", n, total; fflush() }
}
/^Installing/ { if (tty) printf "\r"; print "  installing ...                                             "; fflush() }
/^ERROR|^error/ { print; fflush() }
