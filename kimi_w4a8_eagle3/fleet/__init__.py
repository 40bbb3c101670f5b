"""Several replicas behind SGLang's router: started, identified, registered, restarted one by one."""
