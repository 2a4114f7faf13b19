extern char defd; int value(void){return (long)&defd;}
