"""What launched kernels need beside a library of them: a layer's arrays as write kernels read them."""
